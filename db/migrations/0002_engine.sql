-- compatible-from: 1
--
-- What engines and job lists need: dispatch, children, replacing and forgetting, the state of a job.
--
-- Each function is one transaction of its own and answers an outcome, never an error, for what a client can cause. Who
-- touches several jobs takes their locks in id order, all before the first change, as record_steps does.

-- Finding the jobs to resume; the failed ones; those of a name or with a label. None of
-- these columns is changed by recording a step.
create index job_open_by_creation on cairn.job (created_at, id) where status = 'open';
create index job_failed_by_creation on cairn.job (created_at, id) where status = 'failed';
create index job_by_name on cairn.job (name, created_at, id) where name is not null;
-- Without a list of pending entries, which every look-up would have to read whole.
create index job_by_label on cairn.job using gin (labels jsonb_path_ops) with (fastupdate = off) where labels <> '{}';

-- Creates the missing jobs and locks all, in id order; answers which were created. A job deleted in between makes the
-- transaction fail as one that can be repeated.
create function cairn.lock_jobs(job_ids uuid[], lock_wait_ms integer) returns uuid[]
language plpgsql volatile as $$
declare
  created uuid[];
  locked bigint;
begin
  perform cairn.require_durable_commit();
  perform set_config('lock_timeout', lock_wait_ms::text, true);
  with inserted as (
    insert into cairn.job (id)
    select distinct wanted.id from unnest(job_ids) as wanted (id)
    where not exists (select from cairn.job j where j.id = wanted.id)
    order by 1
    on conflict do nothing
    returning id
  )
  select coalesce(array_agg(id), '{}') into created from inserted;
  perform from cairn.job where id = any (job_ids) order by id for update;
  get diagnostics locked = row_count;
  if locked < (select count(distinct wanted.id) from unnest(job_ids) as wanted (id)) then
    raise exception 'a job was deleted meanwhile' using errcode = 'serialization_failure';
  end if;
  return created;
end
$$;

-- Locks a job that is there; false if it is not.
create function cairn.lock_existing_job(job_id uuid, lock_wait_ms integer) returns boolean
language plpgsql volatile as $$
begin
  perform cairn.require_durable_commit();
  perform set_config('lock_timeout', lock_wait_ms::text, true);
  perform from cairn.job where id = job_id for update;
  return found;
end
$$;

-- Marks one more change of a locked job; its new version.
create function cairn.touch(job_id uuid) returns text
language sql volatile as $$
  update cairn.job j set change_count = j.change_count + 1, updated_at = clock_timestamp()
  where j.id = job_id
  returning cairn.version_text(j)
$$;

-- Whether a key of the list has no result in the job's checkpoint.
create function cairn.has_open_key(job_id uuid, keys text[]) returns boolean
language sql stable as $$
  select exists (
    select from unnest(keys) as awaited (key)
    where not exists (select from cairn.step s where s.job_id = $1 and s.key = awaited.key and s.result is not null)
      and cairn.inherited_result($1, awaited.key) is null)
$$;

-- A dispatched child of the job is still awaited: the child's checkpoint leans on the job's steps.
create function cairn.is_parked(job_id uuid) returns boolean
language sql stable as $$
  select exists (
    select from cairn.job j
    join cairn.child c on c.job_id = j.id and c.key = any (j.pending_keys)
      and c.status = 'running' and c.scheduled_for is not null
    where j.id = $1)
$$;

-- Gives those children whose rows this transaction created a checkpoint: the parent's steps as of now, and their key.
create function cairn.give_checkpoints(parent cairn.job, keys text[], child_ids uuid[]) returns void
language sql volatile as $$
  update cairn.job j set
    change_count = 1,
    parent_id = parent.id,
    parent_created_at = parent.created_at,
    parent_bound = parent.last_position,
    executing_key = given.key
  from unnest(keys, child_ids) as given (key, child_id)
  where j.id = given.child_id and j.change_count = 0
$$;

-- Parks a job: sets what it waits for, maps keys to children, opens timeline entries, and gives each new child a
-- checkpoint that refers to the parent's steps as of now. child_keys and child_ids go together, as do entry_keys and
-- entry_extras; keys holds them all. pending is the JSON of {mode, keys, job_ids}.
--
-- outcome: dispatched · unchanged (a repeat: the same mapping is there, and its keys are what the job waits for, or are all
-- completed) · source_changed · job_finished · child_taken (culprit is a child of another job or key) · stale_child
-- (culprit was a child of this job, and its key was given to another or to none)
create function cairn.dispatch_v1(
  parent_id uuid, keys text[], child_keys text[], child_ids uuid[], pending text, input_args text, source_hash text,
  entry_keys text[], entry_extras text[], lock_wait_ms integer
) returns table (outcome text, version text, pending_keys text[], culprit text)
language plpgsql volatile
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  moment text := cairn.utc_text(clock_timestamp());
  created uuid[];
  parent cairn.job;
  taken uuid;
  stale uuid;
  same_mapping boolean;
begin
  created := cairn.lock_jobs(dispatch_v1.child_ids || dispatch_v1.parent_id, dispatch_v1.lock_wait_ms);
  select * into parent from cairn.job where id = dispatch_v1.parent_id;

  select c.child_id into taken
  from unnest(dispatch_v1.child_keys, dispatch_v1.child_ids) as given (key, child_id)
  join cairn.child c on c.child_id = given.child_id
  where c.job_id <> dispatch_v1.parent_id and c.scheduled_for is not null
    or c.job_id = dispatch_v1.parent_id and c.key <> given.key
  limit 1;

  select c.child_id into stale
  from cairn.child c
  where c.job_id = dispatch_v1.parent_id and c.child_id = any (dispatch_v1.child_ids) and c.key is null
  limit 1;

  same_mapping := not exists (
    select from unnest(dispatch_v1.child_keys, dispatch_v1.child_ids) as given (key, child_id)
    where not exists (
      select from cairn.child c
      where c.job_id = dispatch_v1.parent_id and c.child_id = given.child_id and c.key = given.key
        and c.scheduled_for is not null));

  outcome := case
    when dispatch_v1.source_hash <> '' and parent.source_hash <> '' and dispatch_v1.source_hash <> parent.source_hash
      then 'source_changed'
    when taken is not null then 'child_taken'
    when stale is not null then 'stale_child'
    -- A repeat, perhaps a late one, of what has been answered: whatever the job has come to since must stand.
    when same_mapping and parent.change_count > 0
      and (parent.pending_keys @> dispatch_v1.keys and parent.pending_keys <@ dispatch_v1.keys
        or not cairn.has_open_key(dispatch_v1.parent_id, dispatch_v1.keys)) then 'unchanged'
    when parent.status <> 'open' then 'job_finished'
    else 'dispatched'
  end;
  culprit := coalesce(taken, stale)::text;

  if outcome <> 'dispatched' then
    -- A child whose job was deleted while it is awaited gets its checkpoint anew: an empty one would run it as a whole.
    if outcome = 'unchanged' then
      perform cairn.give_checkpoints(parent, array_agg(c.key), array_agg(c.child_id))
      from cairn.child c
      where c.job_id = parent.id and c.child_id = any (created) and c.status = 'running'
        and cairn.has_open_key(parent.id, array[c.key]);
    end if;
    delete from cairn.job where id = any (created) and change_count = 0;
    version := cairn.version_text(parent);
    pending_keys := parent.pending_keys;
    return next;
    return;
  end if;

  -- A key maps to one child: who had it before is stale from now on.
  update cairn.child c set key = null, change = parent.change_count + 1
  from unnest(dispatch_v1.child_keys, dispatch_v1.child_ids) as given (key, child_id)
  where c.job_id = dispatch_v1.parent_id and c.key = given.key and c.child_id <> given.child_id;

  with given as (
    select g.key, g.child_id, row_number() over (order by g.no) as rank
    from unnest(dispatch_v1.child_keys, dispatch_v1.child_ids) with ordinality as g (key, child_id, no)
  )
  insert into cairn.child as c (job_id, child_id, key, name, position, change, scheduled_for)
  select dispatch_v1.parent_id, given.child_id, given.key, given.key, parent.last_position + given.rank,
    parent.change_count + 1, moment
  from given
  on conflict (job_id, child_id) do update
    set scheduled_for = coalesce(c.scheduled_for, excluded.scheduled_for), change = excluded.change;

  -- A child that was done and whose result was forgotten since runs anew.
  update cairn.child c set status = 'running', scheduled_for = moment, started_at = null, duration_ms = null
  where c.job_id = dispatch_v1.parent_id and c.child_id = any (dispatch_v1.child_ids) and c.status <> 'running'
    and cairn.has_open_key(dispatch_v1.parent_id, array[c.key]);

  -- A step that is open keeps its place in the timeline; one that is completed is left alone.
  insert into cairn.step as s (job_id, key, job_number, position, change, scheduled_for, extra)
  select dispatch_v1.parent_id, e.key, parent.number,
    parent.last_position + cardinality(dispatch_v1.child_ids) + row_number() over (order by e.no),
    parent.change_count + 1, moment, e.extra::json
  from unnest(dispatch_v1.entry_keys, dispatch_v1.entry_extras) with ordinality as e (key, extra, no)
  on conflict (job_id, key) do update
    set scheduled_for = excluded.scheduled_for, started_at = null, duration_ms = null, extra = excluded.extra,
      change = excluded.change
    where s.result is null;

  perform cairn.give_checkpoints(parent, dispatch_v1.child_keys, dispatch_v1.child_ids);

  update cairn.job j set
    change_count = j.change_count + 1,
    updated_at = clock_timestamp(),
    last_position = j.last_position + cardinality(dispatch_v1.child_ids) + cardinality(dispatch_v1.entry_keys),
    source_hash = case when j.source_hash = '' then dispatch_v1.source_hash else j.source_hash end,
    input_args = coalesce(dispatch_v1.input_args::json, j.input_args),
    pending = case when is_open then dispatch_v1.pending::json end,
    pending_keys = case when is_open then dispatch_v1.keys end
  from (select cairn.has_open_key(dispatch_v1.parent_id, dispatch_v1.keys) as is_open) as state
  where j.id = dispatch_v1.parent_id
  returning cairn.version_text(j), j.pending_keys into version, pending_keys;
  return next;
end
$$;

-- Notes that a child began. outcome: started · unchanged (it had begun, or is done) · stale_child · job_finished
create function cairn.start_child_v1(parent_id uuid, child uuid, started_at text, lock_wait_ms integer)
returns table (outcome text, version text, key text, pending_keys text[])
language plpgsql volatile as $$
#variable_conflict use_column
declare
  found_child cairn.child;
begin
  if cairn.lock_existing_job(start_child_v1.parent_id, start_child_v1.lock_wait_ms) then
    select * into found_child from cairn.child c
    where c.job_id = start_child_v1.parent_id and c.child_id = start_child_v1.child;
  end if;
  if found_child.key is null then
    outcome := 'stale_child';
    return next;
    return;
  end if;
  if found_child.started_at is null
    or found_child.status = 'running' and found_child.started_at <> start_child_v1.started_at then
    if exists (select from cairn.job j where j.id = start_child_v1.parent_id and j.status <> 'open') then
      outcome := 'job_finished';
      return next;
      return;
    end if;
    update cairn.child c set
      started_at = coalesce(start_child_v1.started_at, cairn.utc_text(clock_timestamp())),
      scheduled_for = coalesce(c.scheduled_for, start_child_v1.started_at, cairn.utc_text(clock_timestamp())),
      change = (select j.change_count + 1 from cairn.job j where j.id = c.job_id)
    where c.job_id = start_child_v1.parent_id and c.child_id = start_child_v1.child;
    perform cairn.touch(start_child_v1.parent_id);
    outcome := 'started';
  else
    outcome := 'unchanged';
  end if;
  select cairn.version_text(j), j.pending_keys into version, pending_keys
  from cairn.job j where j.id = start_child_v1.parent_id;
  key := found_child.key;
  return next;
end
$$;

-- Records a child's result under its key, and its timing in its own entry. Either result is given, or error and
-- error_message, JSON texts that become the failure marker of the Windmill SDKs.
--
-- outcome: recorded · unchanged · stale_child · job_finished · checkpoint_full
create function cairn.complete_child_v1(
  parent_id uuid, child uuid, result text, error text, error_message text, failed boolean,
  started_at text, duration_ms bigint, max_steps bigint, max_bytes bigint, lock_wait_ms integer
) returns table (outcome text, version text, key text, pending_keys text[])
language plpgsql volatile as $$
#variable_conflict use_column
declare
  parent cairn.job;
  found_child cairn.child;
  known cairn.step;
  new_result text;
  new_bytes bigint;
  is_new boolean;
begin
  if cairn.lock_existing_job(complete_child_v1.parent_id, complete_child_v1.lock_wait_ms) then
    select * into parent from cairn.job j where j.id = complete_child_v1.parent_id;
    select * into found_child from cairn.child c
    where c.job_id = complete_child_v1.parent_id and c.child_id = complete_child_v1.child;
  end if;
  if found_child.key is null then
    outcome := 'stale_child';
    return next;
    return;
  end if;
  key := found_child.key;
  new_result := coalesce(complete_child_v1.result,
    '{"__wmill_error":true,"message":' || complete_child_v1.error_message || ',"step_key":' || to_json(found_child.key)
      || ',"result":{"error":' || complete_child_v1.error || '}}');
  new_bytes := octet_length(new_result);
  select * into known from cairn.step s where s.job_id = parent.id and s.key = found_child.key;
  is_new := known.result is null;

  outcome := case
    when known.result::text = new_result and found_child.status <> 'running'
      and (complete_child_v1.started_at is null or complete_child_v1.started_at = found_child.started_at)
      and (complete_child_v1.duration_ms is null or complete_child_v1.duration_ms = found_child.duration_ms)
      then 'unchanged'
    when parent.status <> 'open' then 'job_finished'
    when is_new and parent.step_count + 1 > complete_child_v1.max_steps then 'checkpoint_full'
    when new_bytes > coalesce(known.bytes, 0)
      and parent.bytes + new_bytes - coalesce(known.bytes, 0) > complete_child_v1.max_bytes then 'checkpoint_full'
    else 'recorded'
  end;

  if outcome = 'recorded' then
    insert into cairn.step as s (job_id, key, job_number, result, failed, bytes, position, change)
    values (parent.id, found_child.key, parent.number, new_result::json, complete_child_v1.failed, new_bytes,
      parent.last_position + 1, parent.change_count + 1)
    on conflict (job_id, key) do update set
      result = excluded.result, failed = excluded.failed, bytes = excluded.bytes, change = excluded.change,
      position = case when s.result is null then excluded.position else s.position end;

    update cairn.child c set
      status = case when complete_child_v1.failed then 'failed' else 'completed' end,
      started_at = coalesce(complete_child_v1.started_at, c.started_at),
      duration_ms = coalesce(complete_child_v1.duration_ms, c.duration_ms),
      scheduled_for = coalesce(c.scheduled_for, complete_child_v1.started_at, cairn.utc_text(clock_timestamp())),
      change = parent.change_count + 1
    where c.job_id = parent.id and c.child_id = found_child.child_id;

    update cairn.job j set
      change_count = j.change_count + 1,
      updated_at = clock_timestamp(),
      last_position = j.last_position + is_new::integer,
      step_count = j.step_count + is_new::integer,
      failed_count = j.failed_count + complete_child_v1.failed::integer - coalesce(known.failed, false)::integer,
      replace_count = j.replace_count + (not is_new)::integer,
      bytes = j.bytes + new_bytes - coalesce(known.bytes, 0),
      pending = case when is_open then j.pending end,
      pending_keys = case when is_open then j.pending_keys end
    from (select cairn.has_open_key(parent.id, parent.pending_keys) as is_open) as state
    where j.id = parent.id
    returning j.* into parent;
  end if;
  version := cairn.version_text(parent);
  pending_keys := parent.pending_keys;
  return next;
end
$$;

-- Replaces a whole checkpoint; no timeline entry is touched, no hash checked.
--
-- outcome: replaced · unchanged · precondition_failed (if_versions is given and the version is not among them; '*' stands
-- for any job that is there) · job_parked · job_finished · checkpoint_full
create function cairn.put_checkpoint_v1(
  job_id uuid, new_hash text, step_keys text[], step_results text[], step_failures boolean[],
  new_pending text, new_pending_keys text[], new_input_args text, child_keys text[], child_ids uuid[],
  new_executing_key text, new_extra text,
  if_versions text[], force boolean, max_steps bigint, max_bytes bigint, lock_wait_ms integer
) returns table (outcome text, version text)
language plpgsql volatile
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  created uuid[];
  j cairn.job;
  new_count bigint := cardinality(put_checkpoint_v1.step_keys);
  new_bytes bigint;
  changed bigint := 0;
  affected bigint;
begin
  created := cairn.lock_jobs(array[put_checkpoint_v1.job_id], put_checkpoint_v1.lock_wait_ms);
  select * into j from cairn.job where id = put_checkpoint_v1.job_id;
  select coalesce(sum(octet_length(r.result)), 0) into new_bytes from unnest(put_checkpoint_v1.step_results) as r (result);
  outcome := case
    when if_versions is not null and (j.change_count = 0
      or not ('*' = any (if_versions) or cairn.version_text(j) = any (if_versions)))
      and not (j.change_count = 0 and '0' = any (if_versions)) then 'precondition_failed'
    when not put_checkpoint_v1.force and cairn.is_parked(j.id) then 'job_parked'
    when j.status <> 'open' then 'job_finished'
    when new_count > max_steps and new_count > j.step_count or new_bytes > max_bytes and new_bytes > j.bytes
      then 'checkpoint_full'
  end;
  if outcome is not null then
    delete from cairn.job where id = any (created);
    version := case when j.change_count = 0 then '0' else cairn.version_text(j) end;
    return next;
    return;
  end if;

  -- Two lists of thousands are compared below: by a hash, since a nested loop would take seconds.
  perform set_config('enable_nestloop', 'off', true);

  -- Steps that are gone: those with a timeline entry keep it and lose their result.
  update cairn.step s set result = null, failed = false, bytes = 0, change = j.change_count + 1
  where s.job_id = j.id and s.result is not null and s.scheduled_for is not null
    and not exists (select from unnest(put_checkpoint_v1.step_keys) as given (key) where given.key = s.key);
  get diagnostics affected = row_count;
  changed := changed + affected;
  delete from cairn.step s
  where s.job_id = j.id and s.scheduled_for is null
    and not exists (select from unnest(put_checkpoint_v1.step_keys) as given (key) where given.key = s.key);
  get diagnostics affected = row_count;
  changed := changed + affected;

  insert into cairn.step as s (job_id, key, job_number, result, failed, bytes, position, change)
  select j.id, given.key, j.number, given.result::json, given.failed, octet_length(given.result),
    j.last_position + given.no, j.change_count + 1
  from unnest(put_checkpoint_v1.step_keys, put_checkpoint_v1.step_results, put_checkpoint_v1.step_failures)
    with ordinality as given (key, result, failed, no)
  on conflict (job_id, key) do update set
    result = excluded.result, failed = excluded.failed, bytes = excluded.bytes, change = excluded.change,
    position = case when s.result is null then excluded.position else s.position end
  where s.result is null or s.result::text <> excluded.result::text;
  get diagnostics affected = row_count;
  changed := changed + affected;

  -- Mappings that are gone: a child with a timeline entry keeps it and loses its key.
  update cairn.child c set key = null, change = j.change_count + 1
  where c.job_id = j.id and c.key is not null
    and not exists (
      select from unnest(put_checkpoint_v1.child_keys, put_checkpoint_v1.child_ids) as given (key, child_id)
      where given.child_id = c.child_id and given.key = c.key);
  get diagnostics affected = row_count;
  changed := changed + affected;
  delete from cairn.child c where c.job_id = j.id and c.key is null and c.scheduled_for is null;
  insert into cairn.child as c (job_id, child_id, key, name, position, change)
  select j.id, given.child_id, given.key, given.key, j.last_position + new_count + given.no, j.change_count + 1
  from unnest(put_checkpoint_v1.child_keys, put_checkpoint_v1.child_ids) with ordinality as given (key, child_id, no)
  on conflict (job_id, child_id) do update set key = excluded.key, change = excluded.change
  where c.key is distinct from excluded.key;
  get diagnostics affected = row_count;
  changed := changed + affected;

  if changed = 0 and j.change_count > 0 and j.parent_id is null
    and j.source_hash = new_hash and j.input_args::text = new_input_args
    and j.pending::text is not distinct from new_pending
    and j.executing_key is not distinct from new_executing_key
    and j.extra::text is not distinct from new_extra then
    outcome := 'unchanged';
    version := cairn.version_text(j);
    return next;
    return;
  end if;

  outcome := 'replaced';
  update cairn.job t set
    change_count = t.change_count + 1,
    rewrite_count = t.rewrite_count + 1,
    replace_count = t.replace_count + 1,
    updated_at = clock_timestamp(),
    last_position = t.last_position + new_count + cardinality(put_checkpoint_v1.child_ids),
    step_count = new_count,
    failed_count = (select count(*) from unnest(put_checkpoint_v1.step_failures) as f (failed) where f.failed),
    bytes = new_bytes,
    source_hash = new_hash,
    pending = new_pending::json,
    pending_keys = new_pending_keys,
    input_args = new_input_args::json,
    extra = new_extra::json,
    executing_key = new_executing_key,
    -- What is put is the whole checkpoint: a child that was given one no longer leans on its parent.
    parent_id = null,
    parent_created_at = null,
    parent_bound = null
  where t.id = j.id
  returning cairn.version_text(t) into version;
  return next;
end
$$;

-- Creates a job or describes it anew; what is null stays as it is. outcome: created · described · unchanged · source_changed
create function cairn.describe_job_v1(
  job_id uuid, new_name text, new_labels text, new_input_args text, source_hash text, lock_wait_ms integer
) returns table (outcome text, version text)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  j cairn.job;
begin
  perform cairn.lock_jobs(array[describe_job_v1.job_id], describe_job_v1.lock_wait_ms);
  select * into j from cairn.job where id = describe_job_v1.job_id;
  outcome := case
    when j.change_count = 0 then 'created'
    when describe_job_v1.source_hash <> '' and j.source_hash <> '' and j.source_hash <> describe_job_v1.source_hash
      then 'source_changed'
    when j.name is not distinct from coalesce(new_name, j.name)
      and j.labels = coalesce(new_labels::jsonb, j.labels)
      and j.input_args::text = coalesce(new_input_args, j.input_args::text)
      and (describe_job_v1.source_hash = '' or j.source_hash <> '') then 'unchanged'
    else 'described'
  end;
  if outcome in ('created', 'described') then
    update cairn.job t set
      change_count = t.change_count + 1,
      updated_at = clock_timestamp(),
      name = coalesce(new_name, t.name),
      labels = coalesce(new_labels::jsonb, t.labels),
      input_args = coalesce(new_input_args::json, t.input_args),
      source_hash = case when t.source_hash = '' then describe_job_v1.source_hash else t.source_hash end
    where t.id = j.id
    returning t.* into j;
  end if;
  version := cairn.version_text(j);
  return next;
end
$$;

-- Finishes a job. outcome: finished · unchanged (with this very result already) · job_finished (with another)
create function cairn.complete_job_v1(job_id uuid, new_result text, new_status text, lock_wait_ms integer)
returns table (outcome text, version text)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  j cairn.job;
begin
  perform cairn.lock_jobs(array[complete_job_v1.job_id], complete_job_v1.lock_wait_ms);
  select * into j from cairn.job where id = complete_job_v1.job_id;
  outcome := case
    when j.status = 'open' then 'finished'
    when j.status = new_status and j.result::text = new_result then 'unchanged'
    else 'job_finished'
  end;
  if outcome = 'finished' then
    update cairn.job t set
      status = new_status, result = new_result::json, finished_at = clock_timestamp(), updated_at = clock_timestamp(),
      change_count = t.change_count + 1
    where t.id = j.id
    returning t.* into j;
  end if;
  version := cairn.version_text(j);
  return next;
end
$$;

-- Opens a finished job again. outcome: reopened · unchanged · job_not_found
create function cairn.reopen_job_v1(job_id uuid, lock_wait_ms integer) returns table (outcome text, version text)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  j cairn.job;
begin
  if not cairn.lock_existing_job(reopen_job_v1.job_id, reopen_job_v1.lock_wait_ms) then
    outcome := 'job_not_found';
    return next;
    return;
  end if;
  update cairn.job t set
    status = 'open', result = null, finished_at = null, updated_at = clock_timestamp(), change_count = t.change_count + 1
  where t.id = reopen_job_v1.job_id and t.status <> 'open';
  outcome := case when found then 'reopened' else 'unchanged' end;
  select cairn.version_text(t) into version from cairn.job t where t.id = reopen_job_v1.job_id;
  return next;
end
$$;

-- Forgets one step with its timeline entry. outcome: forgotten · unchanged (there was none) · job_parked
create function cairn.forget_step_v1(job_id uuid, step_key text, force boolean, lock_wait_ms integer)
returns table (outcome text)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  gone cairn.step;
begin
  outcome := 'unchanged';
  if cairn.lock_existing_job(forget_step_v1.job_id, forget_step_v1.lock_wait_ms) then
    if not forget_step_v1.force and cairn.is_parked(forget_step_v1.job_id)
      and exists (select from cairn.step s where s.job_id = forget_step_v1.job_id and s.key = step_key) then
      outcome := 'job_parked';
    else
      delete from cairn.step s where s.job_id = forget_step_v1.job_id and s.key = step_key returning s.* into gone;
      if found then
        outcome := 'forgotten';
        update cairn.job j set
          change_count = j.change_count + 1,
          rewrite_count = j.rewrite_count + 1,
          replace_count = j.replace_count + 1,
          updated_at = clock_timestamp(),
          step_count = j.step_count - (gone.result is not null)::integer,
          failed_count = j.failed_count - gone.failed::integer,
          bytes = j.bytes - gone.bytes
        where j.id = forget_step_v1.job_id;
      end if;
    end if;
  end if;
  return next;
end
$$;

-- Forgets a job with its steps and entries; its children's jobs stay. outcome: forgotten · unchanged · job_parked
create function cairn.forget_job_v1(job_id uuid, force boolean, lock_wait_ms integer)
returns table (outcome text)
language plpgsql volatile as $$
#variable_conflict use_column
begin
  outcome := 'unchanged';
  if cairn.lock_existing_job(forget_job_v1.job_id, forget_job_v1.lock_wait_ms) then
    if not forget_job_v1.force and cairn.is_parked(forget_job_v1.job_id) then
      outcome := 'job_parked';
    else
      delete from cairn.step s where s.job_id = forget_job_v1.job_id;
      delete from cairn.child c where c.job_id = forget_job_v1.job_id;
      delete from cairn.job j where j.id = forget_job_v1.job_id;
      outcome := 'forgotten';
    end if;
  end if;
  return next;
end
$$;
