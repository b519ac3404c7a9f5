"""The engine's speed on one device: see ``__main__``."""
