"""What tuners, the command line and dashboards call, with the owner's token or one of a study."""

from __future__ import annotations

from fastapi import APIRouter

from scheduler.api.action_routes import action_routes
from scheduler.api.client_access import ClientAccess
from scheduler.api.display_routes import display_routes
from scheduler.api.driver_routes import driver_routes
from scheduler.api.package_routes import package_routes
from scheduler.api.page.files import file_routes
from scheduler.api.page.live_routes import live_routes
from scheduler.api.page.looking_back import looking_back_routes
from scheduler.api.page.session_routes import session_routes
from scheduler.api.page.what_if import what_if_routes
from scheduler.api.row_routes import row_routes
from scheduler.api.service import Service
from scheduler.api.study_routes import study_routes
from scheduler.api.token_routes import token_routes
from scheduler.api.trial_routes import trial_routes


def client_routes(service: Service) -> APIRouter:
    access = ClientAccess(service.store)
    routes = APIRouter()
    for part in (
        study_routes,
        driver_routes,
        trial_routes,
        action_routes,
        display_routes,
        row_routes,
        token_routes,
        live_routes,
        looking_back_routes,
    ):
        routes.include_router(part(service, access))
    routes.include_router(package_routes(service))
    routes.include_router(session_routes(service))
    routes.include_router(what_if_routes(service))
    routes.include_router(file_routes())
    return routes
