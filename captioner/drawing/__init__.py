"""Figures, animations, pages and archives of captions and their attention."""
