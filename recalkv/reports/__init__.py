"""Pages, pictures and tables made from the outputs of the stages."""
