"""The engine room of 06_full_llm_training.py: what makes it fast and dependable, one room a purpose; map: README.md."""
