"""Figures and pictures: how a chapter's become files, and how pages show them."""
