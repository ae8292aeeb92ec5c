"""Verifier plug-in: graph optimisers for alpha-beta-CROWN configs."""
