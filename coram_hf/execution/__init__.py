"""Running a merge: threads, processes, resumable phases, and the workspace on disk."""
