"""Who may connect, and what for: certificates, the roles in them, and where plain text may go."""
