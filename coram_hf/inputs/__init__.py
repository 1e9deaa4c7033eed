"""Where weights come from; nothing here knows a merge method."""
