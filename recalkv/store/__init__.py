"""Stage outputs on disk: complete or refused."""
