// node --import tsx examples/typescript/order.ts [job id] [--crash]
import { randomUUID } from 'node:crypto'
import { step } from 'windmill-client'
import { runWorkflow } from './runner.ts'

async function order() {
  const cart = await step('read cart', () => work('read cart', { items: ['tea', 'cup'], cents: 1850 }))
  const [stock, parcel] = await Promise.all([
    step('reserve stock', () => work('reserve stock', { reserved: cart.items.length })),
    step('book parcel', () => work('book parcel', { tracking: randomUUID() })),
  ])
  const payment = await step('charge card', () => work('charge card', { charged: cart.cents }))
  if (process.argv.includes('--crash')) process.kill(process.pid, 'SIGKILL')

  const bonus = await step('add bonus points', () => fail('add bonus points', 'No such customer')).catch(
    (error: Error) => `none (${error.message})`,
  )
  await step('send receipt', () => work('send receipt', null))
  return { ...stock, ...parcel, ...payment, bonus }
}

async function work<T>(name: string, result: T): Promise<T> {
  console.log(`* really runs: ${name}`)
  return result
}

async function fail(name: string, message: string): Promise<string> {
  console.log(`* really runs: ${name}`)
  throw new Error(message)
}

const jobId = process.argv.slice(2).find((argument) => argument !== '--crash') ?? randomUUID()
console.log(`Job ${jobId}`)
console.log('Result', JSON.stringify(await runWorkflow(jobId, order)))
