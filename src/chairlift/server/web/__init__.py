"""The pages that the server offers to browsers: the live page and the chat page, and the data of the live page."""
