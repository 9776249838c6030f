"""The demonstration of moving state with its users: convoys drive between edge sites, and an autopilot moves each
convoy's state to the site that the convoy has reached."""
