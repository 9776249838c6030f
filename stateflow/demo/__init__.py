"""The demonstration: real flights stream through one operator while its state moves, and a report is written.

The package ``follow`` has a second demonstration, in which state moves with its users.
"""
