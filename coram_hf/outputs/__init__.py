"""Writing merged weights: to a model in memory, a folder, or an adapter."""
