"""Authentication and permissions: certificates, the roles in them, and the rules for plain text."""
