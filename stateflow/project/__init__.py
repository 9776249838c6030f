"""A small project that runs at once: ``files`` are what it is made of."""
