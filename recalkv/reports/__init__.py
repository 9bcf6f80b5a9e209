"""Pages, pictures and tables from what the stages left."""
