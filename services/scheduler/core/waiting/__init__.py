"""Waits of queued requests: fair sharing among tenants, transient nodes of producers, and deferrals."""
