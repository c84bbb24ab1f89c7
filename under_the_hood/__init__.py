"""The engine room of 06_full_llm_training.py: what makes it fast and dependable, a room for each purpose. README.md is the map."""
