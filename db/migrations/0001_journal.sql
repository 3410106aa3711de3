-- compatible-from: 1
--
-- The journal: one row per job, one row per step, one row per child.
--
-- Flow. A step is recorded by one call of cairn.record_steps_v1, which creates the job's row where it is missing,
-- locks it, writes the step's row and moves the job's counters. Whoever changes a job's steps or children holds the
-- lock of the job's row, so within one job all changes stand in one order, across any number of processes.
--
-- Guarantees. A step's row is never rewritten by another step, so that step 10,000 costs what step 1 cost. Results are
-- of type json, which keeps the text as it came; no operator that decodes JSON is ever applied to them. Functions carry
-- a version in their names: an older and a newer program can work on one schema during an upgrade.
--
-- Not done on purpose: no foreign keys (the row lock and cairn's functions keep the rows together; a key check would
-- cost each step a trigger), no index on any job column that a step changes (the update would cease to be HOT).

create table cairn.job (
  id uuid primary key,
  -- Given anew to a job that is deleted and made anew.
  number bigint generated always as identity,
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(),
  finished_at timestamptz,
  -- '' until the first non-empty hash is seen.
  source_hash text not null default '',
  -- Moves with every change; with created_at it makes the version. A committed row has at least 1.
  change_count bigint not null default 0,
  -- Moves when steps are forgotten or replaced as a whole: a reader between two pages then knows to begin anew.
  rewrite_count bigint not null default 0,
  -- Moves when a result that was there is replaced or forgotten: then children's checkpoints change as well.
  replace_count bigint not null default 0,
  -- The highest position given to a step or child of this job.
  last_position bigint not null default 0,
  -- Of this job's own steps that have a result.
  step_count bigint not null default 0,
  failed_count bigint not null default 0,
  bytes bigint not null default 0,
  -- {mode, keys, job_ids} as it came, and its keys once more for the check whether all are completed.
  pending json,
  pending_keys text[],
  input_args json not null default '{}',
  -- Members of the checkpoint that Cairn does not know, as one object.
  extra json,
  executing_key text,
  -- A child sees the steps of its parent up to the bound, as long as the parent is the one that dispatched it.
  parent_id uuid,
  parent_created_at timestamptz,
  parent_bound bigint,
  name text,
  labels jsonb not null default '{}',
  status text not null default 'open',
  -- What the job ended with: its result, or the failure marker of the Windmill SDKs.
  result json,
  -- One constraint and not four: each is made ready anew for every write.
  constraint job_is_consistent check (
    status in ('open', 'completed', 'failed')
    and (status = 'open') = (finished_at is null)
    and (pending is null) = (pending_keys is null)
    and (parent_id is null) = (parent_bound is null))
)
-- A third of each page stays free for the new versions of its rows, so that updates stay on the page (HOT).
with (fillfactor = 66);

-- Newest first; neither column ever changes.
create index job_by_creation on cairn.job (created_at, id);

create table cairn.step (
  job_id uuid not null,
  key text collate "C" not null,
  job_number bigint not null,
  -- null while only the timing is known (a sleep or an approval that was dispatched).
  result json,
  failed boolean not null default false,
  -- Octets of the result's text.
  bytes bigint not null default 0,
  -- The order of the checkpoint. Given when the step first has a result, kept when its result is replaced.
  position bigint not null,
  -- The job's change_count at the last change of this row.
  change bigint not null,
  -- Times are kept as the client wrote them. All null where only a result is known (a replaced checkpoint).
  scheduled_for text,
  started_at text,
  duration_ms bigint,
  -- Other members of the timeline entry (sleep_duration_s, approval, form, ..), as one object.
  extra json,
  primary key (job_id, key)
);

-- By the job's number and not by its id: a plan made while jobs were short could otherwise look a key up by reading all
-- steps of its job through this index, which for a long job would cost what the number of its steps is.
create unique index step_by_position on cairn.step (job_number, position);

create table cairn.child (
  job_id uuid not null,
  child_id uuid not null,
  -- The key that job_ids maps to this child; null once the key maps to another child, or to none.
  key text collate "C",
  name text not null,
  status text not null default 'running',
  position bigint not null,
  change bigint not null,
  -- Null where only the mapping is known (a replaced checkpoint).
  scheduled_for text,
  started_at text,
  duration_ms bigint,
  extra json,
  primary key (child_id, job_id),
  constraint child_status_known check (status in ('running', 'completed', 'failed'))
);

create unique index child_by_key on cairn.child (job_id, key);

-- A time as JSON and the Windmill front end read it.
create function cairn.utc_text(moment timestamptz) returns text
language sql stable parallel safe
return to_char(moment at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"');

-- A 2xx means committed: no setting of the server, the database or the role may weaken that. Until the transaction
-- ends, so not a SET clause on the function, which would end before the commit.
create function cairn.require_durable_commit() returns void
language plpgsql volatile as $$
begin
  if current_setting('synchronous_commit') not in ('on', 'remote_apply') then
    perform set_config('synchronous_commit', 'on', true);
  end if;
end
$$;

-- Whose steps a job's checkpoint shows, and up to which position: the job itself (generation 0), and for a child the job
-- that dispatched it, that one's own parent, and so on. A parent that was deleted and made anew is not the same parent.
create function cairn.lineage(job_id uuid)
returns table (generation integer, source_id uuid, source_number bigint, bound bigint)
language sql stable parallel safe
begin atomic
  with recursive line as (
    select 0 as generation, j.id as source_id, j.number as source_number, j.last_position as bound,
      j.parent_id, j.parent_created_at, j.parent_bound
    from cairn.job j where j.id = lineage.job_id
    union all
    select line.generation + 1, parent.id, parent.number, line.parent_bound,
      parent.parent_id, parent.parent_created_at, parent.parent_bound
    from line
    join cairn.job parent on parent.id = line.parent_id and parent.created_at = line.parent_created_at
  )
  select line.generation, line.source_id, line.source_number, line.bound from line;
end;

create function cairn.creation_text(created_at timestamptz) returns text
language sql stable parallel safe
return to_hex((extract(epoch from created_at) * 1000000)::bigint);

create function cairn.inherited_version(job_id uuid) returns text
language sql stable parallel safe
begin atomic
  select coalesce(
    string_agg('~' || cairn.creation_text(j.created_at) || '.' || j.replace_count::text, '' order by line.generation), '~')
  from cairn.lineage(inherited_version.job_id) as line
  join cairn.job j on j.id = line.source_id
  where line.generation > 0;
end;

-- The opaque version that clients see: never the same twice, not even for a job deleted and made anew. That of a child
-- also moves with what it sees of its parents.
create function cairn.version_text(shown cairn.job) returns text
language sql stable parallel safe
return cairn.creation_text(shown.created_at) || '.' || shown.change_count::text
  || case when shown.parent_id is null then '' else cairn.inherited_version(shown.id) end;

-- What a child's checkpoint shows under a key that the child has not recorded itself; null if nothing.
create function cairn.inherited_result(job_id uuid, wanted text) returns json
language sql stable parallel safe
begin atomic
  select s.result
  from cairn.lineage(inherited_result.job_id) as line
  join cairn.step s on s.job_id = line.source_id and s.key = wanted and s.position <= line.bound and s.result is not null
  where line.generation > 0
  order by line.generation
  limit 1;
end;

-- Records a batch of steps; each argument array has one element per step.
--
-- Requirements of the caller: within one call each (job, key) stands at most once, the steps of one job name at most
-- one non-empty hash, and all steps of one request are in the same call.
--
-- outcome, one row per step:
--   recorded        written
--   unchanged       there already, with this result and, where given, this timing
--   stands          first_stands was asked and the key has a result: it is in stored, and nothing was written
--   source_changed  the job carries another hash
--   job_finished    the job takes no new results
--   checkpoint_full the job would exceed max_steps or max_bytes (for any step of the one request of the call)
--   single          near a limit: send each request in a call of its own
--   busy            somebody else holds the job's row
--   retry           the job was deleted in between
-- version: the job's before the call. After it, the count behind the dot is one higher where any step was recorded.
-- (Joining the updated rows for it would cost a batch of 256 more than its writes.)
-- Of a job with any other outcome than recorded among the steps of one request, none of that request was written
-- (unchanged and stands excepted, which write nothing by themselves).
create function cairn.record_steps_v1(
  job_ids uuid[], keys text[], results text[], failures boolean[], starts text[], durations bigint[],
  hashes text[], firsts boolean[],
  request_count integer, total_bytes bigint, max_steps bigint, max_bytes bigint,
  skip_locked boolean, lock_wait_ms integer
) returns table (outcome text, stored text, version text)
language plpgsql volatile
-- Without it, a batch of one plans anew at every call once the tables have statistics. Sequential scans are off since
-- a plan made while the tables are empty is kept for the connection's life.
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
declare
  moment timestamptz := clock_timestamp();
  moment_text text := cairn.utc_text(moment);
  created_count integer;
  held uuid[];
  all_held boolean;
  tight uuid[];
  full_jobs uuid[];
begin
  perform cairn.require_durable_commit();
  perform set_config('lock_timeout', lock_wait_ms::text, true);

  -- Missing rows first and in id order: two calls then wait for each other's inserts in one order, and hold no row lock
  -- that a waiting insert could need.
  insert into cairn.job (id)
  select distinct missing.id from unnest(job_ids) as missing (id)
  where not exists (select from cairn.job j where j.id = missing.id)
  order by 1
  on conflict do nothing;
  get diagnostics created_count = row_count;

  if skip_locked then
    select array_agg(j.id), array_agg(j.id) filter (
      where j.step_count + cardinality(keys) > max_steps or j.bytes + total_bytes > max_bytes)
    into held, tight
    from (
      select id, step_count, bytes from cairn.job where id = any (job_ids) order by id for update skip locked
    ) as j;
  else
    select array_agg(j.id), array_agg(j.id) filter (
      where j.step_count + cardinality(keys) > max_steps or j.bytes + total_bytes > max_bytes)
    into held, tight
    from (
      select id, step_count, bytes from cairn.job where id = any (job_ids) order by id for update
    ) as j;
  end if;
  held := coalesce(held, '{}');
  all_held := (select count(distinct wanted.id) from unnest(job_ids) as wanted (id)) = cardinality(held);

  -- Only a request that is alone in its call is measured exactly.
  if tight is not null and request_count = 1 then
    select array_agg(grown.id) into full_jobs
    from (
      select j.id
      from cairn.job j
      cross join lateral (
        select
          count(*) filter (where e.result is null) as added_steps,
          coalesce(sum(octet_length(i.result) - coalesce(e.bytes, 0)), 0) as added_bytes
        from unnest(keys, results, firsts) as i (key, result, first_stands)
        left join cairn.step e on e.job_id = j.id and e.key = i.key
        where not (i.first_stands and e.result is not null)
      ) as delta
      where j.id = any (tight)
        and (delta.added_steps > 0 and j.step_count + delta.added_steps > max_steps
          or delta.added_bytes > 0 and j.bytes + delta.added_bytes > max_bytes)
    ) as grown;
    tight := null;
  end if;

  -- The rows are locked now: this statement sees all that was committed before, and nothing of it can change.
  return query
  with judged as (
    select
      i.no, i.job_id, i.key, i.result, i.failed, i.started_at, i.duration_ms, i.hash,
      octet_length(i.result) as bytes,
      j.number as job_number, j.change_count, j.last_position,
      e.result is not null as completed,
      coalesce(e.failed, false) as was_failed,
      coalesce(e.bytes, 0) as old_bytes,
      case
        when j.id is null then 'retry'
        when not all_held and i.job_id <> all (held) then 'busy'
        when i.job_id = any (tight) then 'single'
        when i.hash <> '' and j.source_hash <> '' and i.hash <> j.source_hash then 'source_changed'
        when i.first_stands and e.result is not null then 'stands'
        when i.first_stands and j.parent_id is not null and cairn.inherited_result(j.id, i.key) is not null then 'stands'
        when e.result::text = i.result
          and (i.started_at is null or i.started_at = e.started_at)
          and (i.duration_ms is null or i.duration_ms = e.duration_ms) then 'unchanged'
        when j.status <> 'open' then 'job_finished'
        when i.job_id = any (full_jobs) then 'checkpoint_full'
        else 'recorded'
      end as outcome,
      case
        when i.first_stands and e.result is not null then e.result::text
        when i.first_stands and j.parent_id is not null then cairn.inherited_result(j.id, i.key)::text
      end as stored,
      cairn.version_text(j) as version
    from unnest(job_ids, keys, results, failures, starts, durations, hashes, firsts) with ordinality
      as i (job_id, key, result, failed, started_at, duration_ms, hash, first_stands, no)
    left join cairn.job j on j.id = i.job_id
    left join cairn.step e on e.job_id = i.job_id and e.key = i.key
  ),
  written as (
    insert into cairn.step as s
      (job_id, key, job_number, result, failed, bytes, position, change, scheduled_for, started_at, duration_ms)
    select
      w.job_id, w.key, w.job_number, w.result::json, w.failed, w.bytes,
      w.last_position + row_number() over (partition by w.job_id, w.completed order by w.no),
      w.change_count + 1,
      coalesce(w.started_at, moment_text), coalesce(w.started_at, moment_text), w.duration_ms
    from judged w
    where w.outcome = 'recorded'
    on conflict (job_id, key) do update set
      result = excluded.result, failed = excluded.failed, bytes = excluded.bytes,
      position = case when s.result is null then excluded.position else s.position end,
      change = excluded.change, scheduled_for = excluded.scheduled_for, started_at = excluded.started_at,
      duration_ms = excluded.duration_ms
  ),
  touched as (
    update cairn.job j set
      change_count = j.change_count + 1,
      updated_at = moment,
      last_position = j.last_position + sums.added_steps,
      step_count = j.step_count + sums.added_steps,
      failed_count = j.failed_count + sums.added_failures,
      replace_count = j.replace_count + sums.replaced_steps,
      bytes = j.bytes + sums.added_bytes,
      source_hash = case when j.source_hash = '' then sums.hash else j.source_hash end,
      -- Dropped when no key is left without a result. (A subquery without a row sets both to null.)
      (pending, pending_keys) = (
        select j.pending, j.pending_keys
        from unnest(j.pending_keys) as awaited (key)
        where not exists (
            select from judged r where r.job_id = j.id and r.key = awaited.key and r.outcome = 'recorded')
          and not exists (
            select from cairn.step s where s.job_id = j.id and s.key = awaited.key and s.result is not null)
          and (j.parent_id is null or cairn.inherited_result(j.id, awaited.key) is null)
        limit 1
      )
    from (
      select
        r.job_id,
        count(*) filter (where not r.completed) as added_steps,
        count(*) filter (where r.completed) as replaced_steps,
        count(*) filter (where r.failed) - count(*) filter (where r.was_failed) as added_failures,
        sum(r.bytes - r.old_bytes) as added_bytes,
        max(r.hash) as hash
      from judged r
      where r.outcome = 'recorded'
      group by r.job_id
    ) as sums
    where j.id = sums.job_id
  )
  select judged.outcome, judged.stored, judged.version from judged order by judged.no;

  -- A job that was created for a step which then was refused leaves no trace.
  if created_count > 0 then
    delete from cairn.job where id = any (job_ids) and change_count = 0;
  end if;
end
$$;

-- Records one step in the two common cases, a job's first step and a new key of an open job far from its limits, and
-- answers the version as record_steps_v1 does. In any other case it writes nothing and answers null: record_steps_v1
-- decides. Few and plain statements, since with one client nothing but their number counts: a statement over arrays costs
-- several times a plain one before it does anything, and each expression is made ready anew in every transaction.
create function cairn.record_step_v1(
  the_job uuid, the_key text, the_result text, is_failure boolean, start text, duration bigint, hash text,
  max_steps bigint, max_bytes bigint, skip_locked boolean, lock_wait_ms text
) returns text
language plpgsql volatile as $$
declare
  is_plain boolean;
  number bigint;
  position bigint;
  change bigint;
  version text;
begin
  if set_config('lock_timeout', lock_wait_ms, true) is null
    or current_setting('synchronous_commit') not in ('on', 'remote_apply') then
    perform cairn.require_durable_commit();
  end if;

  if skip_locked then
    select j.number, j.last_position + 1, j.change_count + 1,
      cairn.creation_text(j.created_at) || '.' || j.change_count,
      j.status = 'open' and j.pending_keys is null and j.parent_id is null
        and (hash = '' or j.source_hash = '' or j.source_hash = hash)
        and j.step_count < max_steps and j.bytes + octet_length(the_result) <= max_bytes
    into number, position, change, version, is_plain
    from cairn.job j where j.id = the_job for update skip locked;
  else
    perform from cairn.job j where j.id = the_job for update;
    return cairn.record_step_v1(the_job, the_key, the_result, is_failure, start, duration, hash, max_steps, max_bytes,
      true, lock_wait_ms);
  end if;

  if is_plain then
    insert into cairn.step (job_id, key, job_number, result, failed, bytes, position, change, scheduled_for, started_at,
      duration_ms)
    select the_job, the_key, number, the_result::json, is_failure, octet_length(the_result), position, change,
      started.at, started.at, duration
    from (select coalesce(start, cairn.utc_text(clock_timestamp()))) as started (at)
    on conflict do nothing;
    if found then
      update cairn.job j set
        change_count = change, updated_at = clock_timestamp(), last_position = position,
        step_count = j.step_count + 1, failed_count = j.failed_count + is_failure::integer,
        bytes = j.bytes + octet_length(the_result),
        source_hash = case when j.source_hash = '' then hash else j.source_hash end
      where j.id = the_job;
      return version;
    end if;
  elsif is_plain is null and max_steps > 0 and octet_length(the_result) <= max_bytes then
    insert into cairn.job as j (id, source_hash, change_count, last_position, step_count, failed_count, bytes)
    values (the_job, hash, 1, 1, 1, is_failure::integer, octet_length(the_result))
    on conflict do nothing
    returning j.number, cairn.creation_text(j.created_at) || '.0' into number, version;
    if found then
      insert into cairn.step (job_id, key, job_number, result, failed, bytes, position, change, scheduled_for, started_at,
        duration_ms)
      select the_job, the_key, number, the_result::json, is_failure, octet_length(the_result), 1, 1,
        started.at, started.at, duration
      from (select coalesce(start, cairn.utc_text(clock_timestamp()))) as started (at);
      return version;
    end if;
  end if;
  return null;
end
$$;

-- A timeline entry as the Windmill front end reads it. extra is an object or null; its members follow the known ones.
create function cairn.timeline_entry(
  name text, scheduled_for text, started_at text, duration_ms bigint, extra json
) returns text
language sql stable parallel safe
return left(json_strip_nulls(json_build_object(
    'scheduled_for', scheduled_for, 'started_at', started_at, 'name', name, 'duration_ms', duration_ms))::text, -1)
  || case when extra is null or extra::text = '{}' then '}' else ',' || substr(extra::text, 2) end;

-- The steps that a job's checkpoint shows: of each key the nearest in the line.
create function cairn.visible_steps(job_id uuid)
returns table (generation integer, "position" bigint, key text, result json)
language sql stable parallel safe
begin atomic
  with line as materialized (select * from cairn.lineage(visible_steps.job_id))
  select line.generation, s.position, s.key, s.result
  from line
  join cairn.step s on s.job_number = line.source_number and s.position <= line.bound and s.result is not null
  where not exists (
    select from line as nearer
    join cairn.step own on own.job_id = nearer.source_id and own.key = s.key and own.position <= nearer.bound
    where nearer.generation < line.generation and own.result is not null);
end;

-- For readers that know Windmill's table: the document that Windmill keeps for a job. Text is put together as text, so
-- that no result is decoded.
create view cairn.v2_job_status as
select
  j.id,
  (
    '{"_checkpoint":{"source_hash":' || to_json(j.source_hash)::text
    || ',"completed_steps":{' || coalesce((
      select string_agg(to_json(v.key)::text || ':' || v.result::text, ',' order by v.generation desc, v.position)
      from cairn.visible_steps(j.id) v), '') || '}'
    || coalesce(',"pending_steps":' || j.pending::text, '')
    || ',"input_args":' || j.input_args::text
    || ',"job_ids":{' || coalesce((
      select string_agg(to_json(c.key)::text || ':' || to_json(c.child_id)::text, ',' order by c.position)
      from cairn.child c where c.job_id = j.id and c.key is not null), '') || '}'
    || coalesce(',"_executing_key":' || to_json(j.executing_key)::text, '')
    || case when j.extra is null or j.extra::text = '{}' then '}' else ',' || substr(j.extra::text, 2) end
    || coalesce((
      select string_agg(',' || entry.member, '' order by entry.position)
      from (
        select s.position, to_json('_step/' || s.key)::text || ':'
          || cairn.timeline_entry(s.key, s.scheduled_for, s.started_at, s.duration_ms, s.extra)
        from cairn.step s where s.job_id = j.id and s.scheduled_for is not null
        union all
        select c.position, to_json(c.child_id)::text || ':'
          || cairn.timeline_entry(c.name, c.scheduled_for, c.started_at, c.duration_ms, c.extra)
        from cairn.child c where c.job_id = j.id and c.scheduled_for is not null
      ) as entry ("position", member)), '')
    || '}'
  )::json as workflow_as_code_status
from cairn.job j;
