"""Decisions of the controller as pure state machines and functions: no I/O, no clock, no messages."""
