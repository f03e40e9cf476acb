"""Reports as trees for programs and as pages for people."""

from shardwise.report._page import Page, text_of
from shardwise.report._train import train_tree
from shardwise.report._train_view import train_page

__all__ = ["Page", "text_of", "train_page", "train_tree"]
