"""Tasks over HTTP, for producers and workers in any language (SK-16).

A server is one of the queue's workers (``http.serving``): it owns partitions as any
worker does, and hands out their claims to clients (``http.dispenser``, decided by
``core.tasks.dispensing``). Later requests name a claim by its task, number and holder
(``http.claims``). The store alone decides, so any server of the queue can answer them,
even after the server that made the claim was killed. Requests and answers are the models of
``http.messages``; a refusal is a problem document
(``http.problems``).

Needs the extra ``web``.
"""
