"""Where merged weights go: a model in memory, a folder, an adapter."""
