//! Real faults: of networks, servers, clocks, storage and configuration, injected into a real server.
//!
//! Each test states its guarantee (G1 to G9 in the crate's docs). Some print figures, such as the peak number of holders
//! and how long the cap was exceeded:
//!
//! ```text
//! cargo test -p tests --all-features --test faults -- --nocapture --test-threads 2
//! ```
//!
//! On Valkey: `.ci/valkey 9 --test faults`, or 8. The tests take under a minute. Those of the clocks need a C compiler.
//!
//! # Every fault and its tests
//!
//! A test without a file is here. `K` is `src/keeper/tests`, `S` is `src/store/redis/tests.rs`, `L` is `tests/layer`,
//! `R` is `tests/replicas.rs`, `M` is `tests/semaphore`, `G` is `gateway/tests/gateway/failures.rs`.
//!
//! | fault | guarantee | tests |
//! | --- | --- | --- |
//! | SIGKILL of a holder | G5 | R `slots_of_a_killed_replica_are_back_after_its_lease`, `tests/history/` `a_killed_process_leaves_nothing_behind` |
//! | SIGSTOP for longer than the lease | G2 | R `a_stopped_replica_aborts_its_streams_when_it_wakes`, `ends::a_stopped_replica_that_goes_on_reports_its_loss`, M `a_stopped_process_notices_its_losses_before_its_work_is_done` |
//! | SIGSTOP while waiting | G4 | `frozen`, K `a_waiter_whose_promotion_ended_unheard_asks_for_its_place`, `src/ledger/tests/rules/queue.rs` `waiters_of_a_silent_replica_are_passed_over_until_it_calls` |
//! | late grant reply or wake-up | G2 | `requests::a_late_wake_up_is_not_used`, `requests::a_slow_store_shortens_permits_and_breaks_no_cap`, K `a_late_wake_up_is_confirmed_before_it_is_used` |
//! | acquire abandoned in flight | G6 | `requests::an_acquire_abandoned_in_flight_leaves_no_ghost`, `requests::an_acquire_that_arrives_after_its_release_leaves_no_ghost`, K `a_request_dropped_at_any_point_leaves_nothing_behind` |
//! | release overtaking a renewal, or overtaken | G6 | `requests::a_renewal_that_arrives_after_the_release_revives_nothing`, `requests::a_release_that_arrives_late_touches_no_other_holder` |
//! | replayed exchange, lost reply | G6 | `requests::lost_replies_cost_neither_the_cap_nor_a_slot`, `src/ledger/tests/rules/leases.rs` `a_repeated_exchange_changes_nothing` |
//! | lost, late and repeated charges, sums and refunds of budgets, processes killed, data lost | G1 for rates | `budgets` |
//! | server clock stepped | G1, G3, G5 | `clocks::a_server_clock_stepped_forward_overshoots_once`, `clocks::a_server_clock_stepped_back_breaks_no_cap`, `clocks::a_clock_stepped_back_by_a_day_leaves_no_deadline_beyond_the_longest_lease`, `clocks::small_steps_cost_no_queue_position` |
//! | client clocks wrong | G1, G3 | `clocks::replicas_whose_clocks_are_wrong_share_one_cap` |
//! | restart without persistence, FLUSHALL, eviction, of a server or of a node of a cluster | G1, bounded | `storage::idle_holders_are_back_before_newcomers`, `losses::cluster::a_node_that_loses_its_data_keeps_the_cap_and_disturbs_no_other`, K `losses.rs`, `src/ledger/tests/rules/generation.rs`, `storage::a_flushed_store_is_restored`, `storage::a_store_that_restarts_empty_is_restored`, `storage::an_evicted_ledger_is_restored`, `reports::data_that_the_store_has_lost_is_reported_with_counts_and_not_by_key`, S `a_store_that_may_evict_is_warned_of_once` |
//! | failover that loses writes | G1, bounded | `storage::a_failover_that_loses_writes_overshoots_by_what_it_lost`; `losses::failover`, `losses::cluster::a_copy_of_a_node_that_lacks_the_last_grants_gets_them_back`; with a sentinel: `tests/sentinel.rs` |
//! | READONLY, LOADING, NOREPLICAS, MISCONF, CLUSTERDOWN, MASTERDOWN, BUSY, OOM, TRYAGAIN | G8 | `outages::passing_trouble_of_a_server_is_an_outage`, `reports::a_state_in_which_some_commands_work_is_reported_once`, `outages::a_loading_server_is_an_outage`, `outages::a_busy_server_is_an_outage`, `outages::a_slot_without_a_node_is_an_outage`, `src/store/server_error.rs` |
//! | resharding under load | G1, G5 | `tests/cluster.rs` |
//! | SCRIPT FLUSH in a loop | G8 | `storage::flushed_scripts_are_noticed_by_no_request`, S `a_script_that_was_flushed_is_sent_again` |
//! | OOM under noeviction | G5, G8 | `storage::without_memory_holders_hold_on_and_give_back`, `storage::without_memory_the_store_is_reported_once_and_asked_rarely`, S `without_memory_leases_are_renewed_and_released_and_newcomers_refused` |
//! | CLIENT PAUSE, a server that stands still, half-open connections | G8 | `outages::passing_trouble_of_a_server_is_an_outage`, `outages::a_broken_network_is_an_outage`, `outages::holders_survive_a_short_outage`, `reports::permits_of_a_fallback_are_no_evidence_of_lost_data` |
//! | the runtime of a connection is left, blocked or dropped | G1, G8 | `runtimes`, M `runtimes.rs` |
//! | output buffers too small for subscribers | G4, G8 | `buffers::output_buffers_that_are_too_small_for_subscribers_are_no_outage`, S `a_buffer_too_small_for_subscribers_is_warned_of_once` |
//! | a partition | G1, G2, G5 | `outages::a_partition_gives_no_slot_twice` |
//! | an outage, a partition, replicas that come and go under `Fallback::Share` | G1, bounded | `shares` |
//! | an overloaded upstream that says when to come back | G3 | `upstream`, K `pauses.rs`, L `pauses.rs` |
//! | connections killed, messages lost | G4 | `queue::killed_connections_keep_nobody_waiting`, `queue::a_wake_up_lost_with_its_connection_is_asked_for`, `queue::without_wake_ups_the_queue_moves_by_polls` |
//! | head of the queue crashed or cancelled | G4 | `queue::a_head_that_is_cut_off_is_passed_over`, R `timed::dead_waiters_are_passed_over`, M `a_cancelled_head_makes_way` |
//! | drop outside a runtime, after it, while panicking | G5 | `ends::permits_and_requests_dropped_after_their_runtime_are_back_within_the_lease`, `ends::a_permit_dropped_by_a_panic_outside_a_runtime_is_back_at_once`, M `dropping_a_permit_outside_a_runtime_is_fine`, L `panic_in_handler_releases` |
//! | client disconnect, reset, HEAD, 204, 304, trailers, empty body | G5, G9 | L `servers.rs`, L `releases.rs`, G `clients_that_leave_in_the_middle_give_back_their_slots` |
//! | reset flood | G7 | `tests/limits` |
//! | a reader that stops, also while the store is black-holed | G1, G2 | L `stalled.rs`, L `revoked.rs` |
//! | unread socket, endless body | G7 | L `no_more_calls_are_open_than_the_limit_allows`, L `unread_frame_makes_room`, L `max_hold_ends_a_stream_that_flows` |
//! | hostile keys | G7 | `tests/limits`, M `hostile_keys_work` |
//! | NOAUTH, WRONGPASS, NOPERM, WRONGTYPE | G8 | `refusals`, S `wrong_credentials_are_reported_as_such_and_not_repeated` |
//! | least-privilege ACL | G8 | `tests/security/rights.rs`, S `the_documented_permissions_are_enough_and_all_needed` |
//! | graceful shutdown under load, over a distance, in an outage | G5 | `ends::a_graceful_shutdown_with_a_thousand_streams_gives_all_back`, R `a_graceful_shutdown_leaves_nothing_behind`, M `test_store::a_shutdown_waits_while_releases_are_confirmed`, M `test_store::a_shutdown_does_not_wait_for_a_store_that_is_gone` |
//!
//! Except for lost data, this suite uses the client of a single server. Other faults of a cluster are in
//! `tests/cluster.rs`.

#[path = "../support/mod.rs"]
mod support;

mod budgets;
mod buffers;
mod clocks;
mod ends;
mod frozen;
mod losses;
mod outages;
mod processes;
mod proxy;
mod queue;
mod refusals;
mod reports;
mod requests;
mod runtimes;
mod scene;
mod shares;
mod storage;
mod upstream;
