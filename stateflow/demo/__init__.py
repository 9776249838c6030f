"""The demonstration: real flights through one operator while its state moves, and a report at the end."""
