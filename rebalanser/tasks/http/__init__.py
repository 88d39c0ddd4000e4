"""Tasks over HTTP, for producers and workers in any language (SK-16).

A server is a node of the queue's workers (:mod:`~rebalanser.tasks.http.serving`): it owns partitions as any
worker does, and hands out claims of them to whoever asks (:mod:`~rebalanser.tasks.http.dispenser`). A claim
is named by its task, number and holder in all later requests
(:mod:`~rebalanser.tasks.http.claims`): the store alone decides, so any server of the queue can answer,
also after the one that made the claim was killed. What is asked and answered are the models of
:mod:`~rebalanser.tasks.http.messages`; what is refused is a problem document
(:mod:`~rebalanser.tasks.http.problems`).

Needs the extra ``web``.
"""
