"""Stage outputs on disk: whole or refused."""
