"""Measurements apart from the tests; README.md says what each is for."""
