"""Compatibility aliases."""
