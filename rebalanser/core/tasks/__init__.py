"""Skuld's decisions. ``rebalanser.tasks`` explains how they fit together, and carries them out."""
