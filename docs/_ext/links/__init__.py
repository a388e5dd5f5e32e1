"""Links from words and names: to the glossary, the reference, PyTorch, and from the search."""
