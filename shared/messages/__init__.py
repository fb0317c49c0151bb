"""Messages, one module per subject family. Commands are imperative, events are in the past tense.

=================  =======================================================  ============================
module             sender and receiver                                      how
=================  =======================================================  ============================
requests           gateway to scheduler                                     JetStream ``TC_INPUTS``
worker_events      worker to scheduler                                      JetStream ``TC_INPUTS``
storage_events     storage to scheduler                                     JetStream ``TC_INPUTS``
cell_events        scheduler shell and operators to scheduler               JetStream ``TC_INPUTS``
worker_plans       scheduler to one worker, numbered                        core NATS, kept by ``TC_OUTPUTS``
storage_plans      scheduler to one storage, numbered                       core NATS, kept by ``TC_OUTPUTS``
gateway_notices    scheduler to one gateway, numbered                       core NATS, kept by ``TC_OUTPUTS``
tokens             worker to gateway, one message per gateway and step      core NATS
status             heartbeats, cell status, request/reply calls             core NATS
pools              geometry and handles of memory pools                     inside other messages
=================  =======================================================  ============================
"""
