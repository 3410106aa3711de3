import type { App } from '../src/app.ts'
import { problemReplies } from '../src/openapi.ts'
import { sendRawJson } from './raw-json-reply.ts'

export async function openapiRoutes(app: App): Promise<void> {
  let text: string | undefined
  app.get(
    '/openapi.json',
    {
      schema: {
        operationId: 'getOpenapi',
        summary: 'Read this description',
        tags: ['operations'],
        response: {
          200: {
            description: 'OpenAPI 3.1.',
            content: {
              'application/json': {
                schema: { type: 'object', additionalProperties: true, examples: [{ openapi: '3.1.0' }] },
              },
            },
          },
          ...problemReplies(),
        },
      },
    },
    async (_request, reply) => {
      text ??= JSON.stringify(app.swagger())
      return sendRawJson(reply, Buffer.from(text))
    },
  )
}
