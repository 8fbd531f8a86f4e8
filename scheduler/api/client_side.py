"""What tuners, the command line and dashboards call, with the owner's token or one of a study."""

from __future__ import annotations

from fastapi import APIRouter

from scheduler.api.client_access import ClientAccess
from scheduler.api.display_routes import display_routes
from scheduler.api.driver_routes import driver_routes
from scheduler.api.package_routes import package_routes
from scheduler.api.service import Service
from scheduler.api.study_routes import study_routes
from scheduler.api.token_routes import token_routes
from scheduler.api.trial_routes import trial_routes


def client_routes(service: Service) -> APIRouter:
    access = ClientAccess(service.store)
    routes = APIRouter()
    for part in (study_routes, driver_routes, trial_routes, display_routes, token_routes):
        routes.include_router(part(service, access))
    routes.include_router(package_routes(service))
    return routes
