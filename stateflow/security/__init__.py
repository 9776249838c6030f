"""Authentication and permissions: certificates, the roles in them, and where plain text may go."""
