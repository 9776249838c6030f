"""The demonstration of state that follows: convoys drive between edge sites, and an autopilot moves their state after
them."""
