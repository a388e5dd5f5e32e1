"""Lists that pages are given: the chapters, the labs."""
