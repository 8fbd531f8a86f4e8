"""Models of several slots: sharded over the processes of a replica, or cut into stages."""
