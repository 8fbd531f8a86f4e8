"""Views for people: the terminal view and the picture of slots over time, drawn from the API's answers."""
