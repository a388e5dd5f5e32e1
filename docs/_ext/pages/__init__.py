"""What readers see on pages: Markdown chapters, tables, formulas, the head, one style sheet."""
