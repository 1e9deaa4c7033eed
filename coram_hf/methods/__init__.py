"""The methods: CORAM, the rivals it is compared with, and what they have in common."""
