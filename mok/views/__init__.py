"""Figures and widgets: they draw tables and compute nothing."""
