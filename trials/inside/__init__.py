"""The first code of a replica, before the user's."""
