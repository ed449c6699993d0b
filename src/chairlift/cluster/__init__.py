"""Several replicas of an engine behind one API, on Ray Serve, with a router that knows their prefix caches."""
