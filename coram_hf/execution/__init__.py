"""How the work is done: threads, processes, phases that resume, and the folder that a merge grows in."""
