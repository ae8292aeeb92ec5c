"""Verifier plug-in: custom auto_LiRPA bound operators for attention."""
