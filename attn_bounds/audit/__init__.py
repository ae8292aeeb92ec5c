"""Re-proving certificates in ball arithmetic (python-flint), from the weights up, trusting no code that found them.

`check` decides; `facts` is the problem in ball arithmetic; the other modules hold one method's proof each.
"""

from .check import AuditReport, audit

__all__ = ["AuditReport", "audit"]
