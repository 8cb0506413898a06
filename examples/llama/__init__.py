"""A small byte-level Llama, trained on the King James text and served in batches that change."""
