"""The demonstration: real flights stream through one operator while its state moves, and a report is written."""
