"""Ranks and bytes, no models: every byte that ranks exchange goes through here."""
