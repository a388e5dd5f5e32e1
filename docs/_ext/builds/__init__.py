"""Where the book is built: its machines, its ranks and hosts, and outputs of another build."""
