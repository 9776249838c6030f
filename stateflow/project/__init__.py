"""A small project that runs at once; its contents are in ``files``."""
