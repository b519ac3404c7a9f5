"""The OpenAI-style HTTP API of a front end. Loads no torch; :mod:`services.http.app` makes the
application.
"""
